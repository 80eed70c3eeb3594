"""`make demo-pipeline`: client -> API -> database -> Kafka -> Spark -> database, exactly once, through two crashes.

Clients place and cancel orders over HTTP. The shop stashes its order events with them; two exactly-once harvesters
publish them; a Spark pipeline projects them into the shop's revenue per product and hour. The leading harvester and
Spark's driver are killed in the middle. At the end the revenue must equal that of the orders table, to the cent.
"""
