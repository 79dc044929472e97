"""``trainmux bench``: step times of many ways to train, measured, recorded and reported.

``command`` reads the options and ``runner`` starts one process (``child``) per measurement; there a way of
``ways`` trains a workload of ``cases``, ``measure`` and ``timing`` time it, and a ``record`` comes back.
``tables``, ``markdown`` and ``svg`` turn records into what people read.
"""
