"""What distributed optimizers stand on: layout of shards, collectives, gradients, checkpoints."""
