"""What to try, in which order, and when to stop."""
