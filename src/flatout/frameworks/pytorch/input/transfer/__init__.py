"""Batches on their way to a device: begun early, and out of the way of what the device computes."""
