"""Parts of the admin's lists: filters, and the summary above them."""
