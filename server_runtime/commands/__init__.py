"""Commands of server-run beside running: one file each, by its name (contract.commands)."""
