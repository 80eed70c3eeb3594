"""The site: the shop and nothing else."""

from django.urls import include, path

urlpatterns = [path("", include("example_project.shop.urls"))]
