"""Batches of a script without workers, made ahead by processes that draw what the script would have drawn."""
