"""Replicas: any engine, several times, as Ray actors anywhere in a cluster.

``dispatch`` decides who computes what, and what becomes of the passes of a replica that ends;
``engine`` and its ``thread`` do it, ``starting`` and ``lives`` bring replicas up, ``actor`` is what
runs in one, ``packing`` what goes there and comes back, ``cluster`` the connection to Ray. What
stays there has its room in ``rooms`` and ``staying``; ``stores`` and ``holders`` hand it out.
"""
