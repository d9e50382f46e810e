"""One script under one plan, to one trace."""
