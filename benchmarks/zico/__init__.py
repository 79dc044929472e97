"""Zico's evaluation: pairs of training jobs on one device, measured and drawn as the paper's figures.

``cases`` are the paper's six models, ``jobs`` trains one of them, ``pair`` trains two in every way that is
compared, ``colocated`` walks a co-location through budgets and ``memory`` looks at one
iteration. ``run`` puts what they find into a file of ``results``; ``figures``, ``tables`` and ``page`` turn
such a file into ``docs/zico.md``. ``command`` is ``python -m benchmarks zico``.
"""
