"""Attacks on what devices upload: what a curious server can reconstruct. One file each; the file's name is its name."""
