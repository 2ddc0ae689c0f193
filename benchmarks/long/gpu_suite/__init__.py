"""A quarter of an hour on a GPU that was never met, prepared on a machine without one.

parts        what is run, in the order of worth, and the seconds of each part
bundle       what travels: programs, wheels, data, losses of a CPU, predictions
programs     programs of all parts, compiled for the GPU by this machine's Triton
carried      how another version of Triton finds them
install      unpacks a bundle on the device
runs         `trainer run` itself, in all the ways that only a device can show
losses       losses of a run beside those of the CPU
wide         layers of 7B models at full width, as many as fit
summary      the last screen: goals, failures, peers, predictions
"""
