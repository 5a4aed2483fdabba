"""One replica at work: the driver, its workers, their networks, weights and optimizers."""
