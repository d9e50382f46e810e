"""What differs between frameworks, behind one contract (`flatout.frameworks.contract`)."""
