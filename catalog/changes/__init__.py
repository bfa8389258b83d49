"""What each kind of event changes in the view. Called by apply.py alone, which says what holds for all of them."""
