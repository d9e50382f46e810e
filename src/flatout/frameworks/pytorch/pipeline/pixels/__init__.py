"""How is the pixel work of a batch done by several threads, while the script's code runs in its own, in its own order?"""
