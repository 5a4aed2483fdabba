"""Which shape: the plan, the simulator that times it, and the search that finds it."""
