"""What every room stands on: messages, tensors by name, arguments, errors, files, randomness."""
