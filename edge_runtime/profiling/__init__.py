"""edge-profile: time, energy and bytes of each split point, with intervals; deciding files apart from the shells."""
