"""The stages of one rank at work: forward and backward, random numbers, averaged gradients."""
