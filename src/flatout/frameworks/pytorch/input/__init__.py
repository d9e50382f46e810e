"""How batches reach the training: passes over loaders, workers, and what makes them cheaper."""
