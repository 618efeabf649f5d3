"""The parts of DistributedDataParallel: plan of buckets, lanes, reductions, checks."""
