"""The input pipeline: the script's own loader, its items computed in other ways, bit for bit the same."""
