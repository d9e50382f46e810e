"""How does a script that knows of one process train on many ranks? One file for each part of the answer."""
