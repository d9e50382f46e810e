"""Does it do any harm to run a dataset's code for an item once more? Found by looking at the code, not by running it."""
