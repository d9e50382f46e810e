"""Files that the next batches open, read before they are wanted: whose items, which files, and by whom?"""
