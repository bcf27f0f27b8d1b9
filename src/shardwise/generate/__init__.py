"""Text from a trained model, by one process."""
