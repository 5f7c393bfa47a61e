"""leakage-profile: what an attacker reads of images behind a package, per split and strength of noise."""
