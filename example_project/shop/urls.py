"""The shop's pages."""

from django.urls import path

from example_project.shop import views

urlpatterns = [
    path("", views.front_page, name="front-page"),
    path("revenue/", views.revenue_page, name="revenue"),
    path("orders/", views.orders, name="orders"),
    path("orders/<int:order_id>/", views.order, name="order"),
    path("orders/<int:order_id>/invoice/", views.invoice, name="invoice"),
]
