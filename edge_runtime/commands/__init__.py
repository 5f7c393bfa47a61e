"""Commands of edge-run beside running: one file each, by its name (contract.commands)."""
