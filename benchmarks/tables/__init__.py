"""Print the tables of the documentation from the saved figures; write them into documents."""
