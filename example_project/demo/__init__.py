"""The demo: two applications, two harvesters for each, a killed leader; nothing may be lost or change its order.

python -m example_project.demo        (or `make demo`)

__main__      options, signals, exit codes
run           what happens, in order
applications  the two applications, seen from outside: commands, topics, and the ledger that is the truth
children      their processes
harvesters    the two harvesters of one outbox: who leads, killing it, seconds without a leader
reception     the consumer
check         the ledger against what the consumer got
screen        progress and the final table
"""
