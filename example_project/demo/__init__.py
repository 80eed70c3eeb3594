"""The demo: two applications, two harvesters for each, and a killed leader; records must all arrive, in order.

python -m example_project.demo        (or `make demo`)

__main__      options, signals, exit codes
run           the steps of the demo, in order
applications  the two applications, seen from outside: commands, topics, and the ledger that is the truth
children      their processes
harvesters    the two harvesters of one outbox: the leader, its killing, the seconds without one
reception     the consumer
check         the ledger against the consumer's records
screen        progress and the final table
"""
