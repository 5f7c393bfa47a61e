"""edge-run --preview: what an attacker gets of a picture with a device's settings. Nothing is sent."""
