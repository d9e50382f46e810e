"""Where a step's time goes in PyTorch: phases, clocks, stack samples, counted operations, memory."""
