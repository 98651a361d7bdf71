"""Words: flags, what is printed, what a run says of the machine it is on."""
