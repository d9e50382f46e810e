"""The script's own loader, its items computed in other ways, bit for bit the same: one part for each way."""
