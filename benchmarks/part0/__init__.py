"""Part 0 of a run on a GPU: what works there and how fast it is, in two to three minutes.

`case`        what is tried: a name, a function, and what it found
`samples`     calls of every registered operation, which a new operation joins
`operations`  those calls against the reference
`rates`       of copies, GEMMs and attention
`recipes`     every recipe through Inductor, CUDA graphs, and a mixture of experts
`groups`      the cases by group, each of which has a process of its own
`worker`      runs a group, a line of JSON per case
`run`         starts the groups side by side; ends those that hang, goes on behind a case that ended its process
`__main__`    the command line
"""
