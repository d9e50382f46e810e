"""Are a step's numbers under levers those without them? Captured, replayed, measured; judged elsewhere."""
