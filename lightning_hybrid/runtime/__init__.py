"""The plan at work: ranks, links, stages, gradients and weights of a running job."""
