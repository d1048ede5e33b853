"""Programs that each hold one kind of state, check it all the time, and say at the end whether it was kept."""
