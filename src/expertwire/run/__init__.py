"""The main job behind ``expertwire run``: mixture-of-experts layers over real text, checked bit for bit.

``text`` turns files into token ids, ``model`` holds the layers, ``job`` runs the ranks and holds them against the
reference, ``report`` shows the outcome and ``trace`` stores the routing. ``docs/run.md`` explains the whole.
"""
