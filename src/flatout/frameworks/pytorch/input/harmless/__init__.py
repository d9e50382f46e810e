"""Does it do any harm to run a dataset's code for an item once more? Found by looking at it, without running it."""
