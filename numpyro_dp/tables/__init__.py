"""Tables that are read in pieces: from files, from frames, and on engines that run the pieces elsewhere."""
