"""Transforms of what leaves the device: one thin file each, from the device's config to the laws in `contract`."""
