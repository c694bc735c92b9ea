"""Planning a sharded run without running it: memory, traffic and time from the model, its inputs and the layout."""
