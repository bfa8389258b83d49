"""The artifact store on object storage (S3, Google Cloud, Azure), through obstore.

Objects are named as the folder store names its files: ``blobs/ab/abcd...`` is complete and of its digest, ``partial/``
is what an upload of unknown digest leaves until it gets its name. May import wire and the rest of catalog.
"""
