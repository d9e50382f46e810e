"""How do several threads do the pixel work of a batch, while the script's code runs in its own, in its own order?"""
