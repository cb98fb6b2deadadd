"""Where it runs: the only place with devices, processes, sockets and the wall clock."""
