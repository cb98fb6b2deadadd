"""What is learned: model, loss, data, split."""
