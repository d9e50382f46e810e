"""PyTorch behind the framework contract."""
