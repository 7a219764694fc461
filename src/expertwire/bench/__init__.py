"""``expertwire bench``: the same exchange done by several libraries, checked first, then timed, then compared.

Read in this order: ``schema`` (what is measured and what comes out), ``inputs`` (what every library gets and must
return), ``adapters`` (one file per library), ``measure`` (the loop), ``report``, ``request`` and ``command``.
"""
