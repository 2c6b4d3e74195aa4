"""Replicas: any engine, several times, as Ray actors anywhere in a cluster.

``dispatch`` decides who computes what, and what becomes of the passes of a replica that ends;
``engine`` does it, ``starting`` and ``restarts`` bring replicas up, ``actor`` is what runs in one,
``packing`` what goes there and comes back, ``cluster`` the connection to Ray.
"""
