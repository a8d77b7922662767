"""What tests share: models, workers of other processes, addresses, readers of programs."""
