"""What is touched of a script that trains with PyTorch: its calls, optimizers, updates, random states."""
